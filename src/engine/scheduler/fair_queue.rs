//! Orders the waiting sequences so that all waiting tenants are served about equal numbers of tokens.
//! A generated token counts more than a prompt token: see `ledger.rs`.
//!
//! The order follows the Virtual Token Counter (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024).
//! Sequences that were preempted often are protected, and start first.
//! After them, the tenant with the fewest served tokens is next.
//! A tenant gets no credit for the time in which none of its sequences waited.
//! The sequences of one tenant start in order of seniority.

use std::collections::{BTreeMap, BTreeSet};

use super::ledger::{TenantId, TenantLedger};
use super::order::{SchedulingTurn, Seniority};

/// The waiting sequences of all tenants.
#[derive(Default)]
pub struct FairQueue {
    /// The waiting sequences of each tenant, the most senior first. A tenant without waiting sequences has no entry.
    waiting: BTreeMap<TenantId, BTreeSet<Seniority>>,
}

impl FairQueue {
    /// Adds a waiting sequence, and updates the counts of served tokens in `ledger`.
    /// If other sequences wait, raises the tenant's count to at least the smallest count of a waiting tenant.
    /// If no other sequence waits, sets the counts of all tenants to 0.
    pub fn insert(&mut self, tenant: TenantId, seniority: Seniority, ledger: &mut TenantLedger) {
        let served = self.served_if_waiting(tenant, ledger);
        if self.waiting.is_empty() {
            // No tenant waits, so no tenant has to catch up with another.
            ledger.reset();
        }
        ledger.set_served(tenant, served);
        self.waiting.entry(tenant).or_default().insert(seniority);
        // The ledger can forget a tenant without sequences that was served at most `fewest` tokens.
        // If that tenant submitted a new sequence, `insert` would raise the tenant's count to `fewest` anyway.
        if let Some(fewest) = self.fewest_served(ledger) {
            ledger.forget(fewest);
        }
    }

    /// Removes a waiting sequence. Does nothing if the sequence is not waiting.
    pub fn remove(&mut self, tenant: TenantId, seniority: &Seniority) {
        let Some(waiting) = self.waiting.get_mut(&tenant) else { return };
        waiting.remove(seniority);
        if waiting.is_empty() {
            self.waiting.remove(&tenant);
        }
    }

    /// Returns the waiting sequence whose turn comes first, and its tenant, or `None` if no sequence is waiting.
    pub fn first(&self, ledger: &TenantLedger) -> Option<(TenantId, Seniority)> {
        let firsts = self.waiting.iter().filter_map(|(&id, waiting)| Some((id, *waiting.first()?)));
        firsts.min_by_key(|&(id, seniority)| ledger.turn(id, seniority))
    }

    /// Estimates how many waiting sequences would start before a new sequence.
    ///
    /// The estimate counts the more senior sequences of this tenant, and up to about as many of every other tenant,
    /// because tenants take turns. The exact number depends on the lengths of the prompts and answers.
    pub fn ahead(&self, tenant: TenantId, seniority: Seniority, ledger: &TenantLedger) -> usize {
        let own = self.waiting.get(&tenant).map_or(0, |waiting| waiting.range(..seniority).count());
        let turn = SchedulingTurn::new(self.served_if_waiting(tenant, ledger), seniority);
        let others = self.waiting.iter().filter(|&(&id, _)| id != tenant);
        let of_other = |(&id, waiting): (&TenantId, &BTreeSet<Seniority>)| {
            let is_first = waiting.first().is_some_and(|&first| ledger.turn(id, first) < turn);
            waiting.len().min(own + usize::from(is_first))
        };
        own + others.map(of_other).sum::<usize>()
    }

    /// Returns the count of served tokens that a tenant has once [`insert`](Self::insert) has added its sequence.
    ///
    /// If no sequence is waiting, the count is 0, because `insert` sets all counts to 0.
    /// If only other tenants wait, the count is at least the smallest count of these tenants,
    /// so the tenant gets no credit for the time in which it did not wait.
    /// If the tenant already waits, its count does not change.
    fn served_if_waiting(&self, tenant: TenantId, ledger: &TenantLedger) -> u64 {
        let Some(fewest) = self.fewest_served(ledger) else { return 0 };
        let served = ledger.served(tenant);
        if self.waiting.contains_key(&tenant) { served } else { served.max(fewest) }
    }

    /// Returns the fewest tokens served to any waiting tenant, or `None` if no sequence is waiting.
    fn fewest_served(&self, ledger: &TenantLedger) -> Option<u64> {
        self.waiting.keys().map(|&tenant| ledger.served(tenant)).min()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn sequence(id: u64) -> Seniority {
        Seniority::new(0, Duration::from_secs(id), id)
    }

    fn first(queue: &FairQueue, ledger: &TenantLedger) -> Option<u64> {
        queue.first(ledger).map(|(_, seniority)| seniority.id())
    }

    /// Adds waiting sequences, given as pairs `(tenant, id)`.
    fn wait(queue: &mut FairQueue, ledger: &mut TenantLedger, sequences: &[(TenantId, u64)]) {
        for &(tenant, id) in sequences {
            ledger.join(tenant, 1);
            queue.insert(tenant, sequence(id), ledger);
        }
    }

    #[test]
    fn one_tenant_is_served_by_seniority() {
        let (mut queue, mut ledger) = (FairQueue::default(), TenantLedger::default());
        wait(&mut queue, &mut ledger, &[(7, 2), (7, 1), (7, 3)]);
        assert!(ledger.has_one_tenant());
        for id in 1..=3 {
            assert_eq!(first(&queue, &ledger), Some(id));
            queue.remove(7, &sequence(id));
            ledger.serve(7, 0..100, 100);
        }
        assert_eq!(first(&queue, &ledger), None);
    }

    #[test]
    fn the_tenant_with_the_fewest_tokens_is_next() {
        let (mut queue, mut ledger) = (FairQueue::default(), TenantLedger::default());
        wait(&mut queue, &mut ledger, &[(0, 0), (0, 1), (0, 2), (1, 3), (1, 4)]);
        assert!(!ledger.has_one_tenant());
        let mut order = Vec::new();
        while let Some((tenant, seniority)) = queue.first(&ledger) {
            order.push(seniority.id());
            queue.remove(tenant, &seniority);
            // Tenant 0 has prompts of 10 tokens. Tenant 1 has prompts of 4 tokens, and generates one token (weight 2).
            ledger.serve(tenant, if tenant == 0 { 0..10 } else { 0..5 }, if tenant == 0 { 10 } else { 4 });
        }
        // The tenants' weighted token counts are 10 and 6 after sequences 0 and 3, and 10 and 12 after sequence 4.
        assert_eq!(order, [0, 3, 4, 1, 2]);
        queue.insert(1, sequence(5).protected(), &mut ledger);
        queue.insert(0, sequence(6), &mut ledger);
        ledger.serve(1, 0..1, 1);
        // Without protection, sequence 6 would now be next, because its tenant has fewer tokens.
        assert_eq!(first(&queue, &ledger), Some(5), "the protected sequence must be next");
    }

    #[test]
    fn time_without_requests_gives_no_credit() {
        let (mut queue, mut ledger) = (FairQueue::default(), TenantLedger::default());
        wait(&mut queue, &mut ledger, &[(0, 0), (0, 1), (0, 2)]);
        ledger.serve(0, 0..1000, 1000);
        wait(&mut queue, &mut ledger, &[(1, 3), (1, 4)]);
        assert_eq!(
            first(&queue, &ledger),
            Some(0),
            "a new tenant must not start with fewer served tokens than the other tenant"
        );
        ledger.serve(0, 0..1, 1);
        assert_eq!(first(&queue, &ledger), Some(3));
        // A tenant keeps its count of served tokens when its sequences end and another tenant still waits.
        ledger.serve(1, 0..500, 500);
        queue.remove(1, &sequence(3));
        queue.remove(1, &sequence(4));
        ledger.leave(1);
        ledger.leave(1);
        wait(&mut queue, &mut ledger, &[(1, 5)]);
        assert_eq!(first(&queue, &ledger), Some(0));
        ledger.serve(0, 0..498, 498);
        assert_eq!(first(&queue, &ledger), Some(0));
        ledger.serve(0, 0..2, 2);
        assert_eq!(first(&queue, &ledger), Some(5));
    }

    #[test]
    fn tenants_are_forgotten() {
        let (mut queue, mut ledger) = (FairQueue::default(), TenantLedger::default());
        for tenant in 0..1000 {
            wait(&mut queue, &mut ledger, &[(tenant, tenant)]);
            ledger.serve(tenant, 0..10, 10);
            queue.remove(tenant, &sequence(tenant));
            ledger.leave(tenant);
        }
        assert_eq!(ledger.tenants(), 1);
    }
}
