//! Orders the waiting sequences so that every tenant gets the same number of tokens.
//!
//! The order follows the Virtual Token Counter (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024).
//! The next sequence to start belongs to the tenant with the fewest served tokens.
//! A tenant gets no credit for the time in which none of its sequences waited.
//! The sequences of one tenant start in order of seniority.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::order::Seniority;

/// Identifies the owner of a sequence, such as a client with its own API key.
pub type TenantId = u64;

/// The weight of a generated token, as in the paper. A prompt token has weight 1.
const GENERATED_WEIGHT: u64 = 2;

/// The rank of a sequence among the sequences of all tenants. The smallest rank gets tokens and blocks first.
pub type Rank = (Reverse<bool>, u64, Seniority);

/// The waiting sequences of all tenants, and the number of tokens served to each tenant.
#[derive(Default)]
pub struct FairQueue {
    tenants: BTreeMap<TenantId, Tenant>,
}

#[derive(Default)]
struct Tenant {
    /// The weighted number of served tokens since the queue was last empty. Comparable between tenants.
    served: u64,
    /// The waiting sequences, the most senior first.
    waiting: BTreeSet<Seniority>,
    /// The number of sequences of the tenant, waiting or not.
    sequences: usize,
}

impl FairQueue {
    /// Adds sequences to a tenant. The sequences do not wait yet.
    pub fn join(&mut self, tenant: TenantId, sequences: usize) {
        self.tenants.entry(tenant).or_default().sequences += sequences;
    }

    /// Removes a sequence from its tenant. The sequence must not be waiting.
    pub fn leave(&mut self, tenant: TenantId) {
        if let Some(tenant) = self.tenants.get_mut(&tenant) {
            tenant.sequences -= 1;
        }
    }

    /// Adds a sequence to the waiting sequences.
    pub fn insert(&mut self, tenant: TenantId, seniority: Seniority) {
        let served = self.served_if_waiting(tenant);
        if self.tenants.values().all(|tenant| tenant.waiting.is_empty()) {
            self.tenants.values_mut().for_each(|tenant| tenant.served = 0);
        }
        let tenant = self.tenants.entry(tenant).or_default();
        tenant.served = served;
        tenant.waiting.insert(seniority);
        // Forget a tenant without sequences once all waiting tenants have been served at least as many tokens.
        let floor = self.tenants.values().filter(|tenant| !tenant.waiting.is_empty()).map(|tenant| tenant.served).min();
        self.tenants.retain(|_, tenant| tenant.sequences > 0 || Some(tenant.served) > floor);
    }

    /// Removes a sequence from the waiting sequences. Has no effect if the sequence is not waiting.
    pub fn remove(&mut self, tenant: TenantId, seniority: &Seniority) {
        if let Some(tenant) = self.tenants.get_mut(&tenant) {
            tenant.waiting.remove(seniority);
        }
    }

    /// Returns the waiting sequence that starts next, and its tenant.
    pub fn first(&self) -> Option<(TenantId, Seniority)> {
        let firsts = self.tenants.iter().filter_map(|(&id, tenant)| Some((id, *tenant.waiting.first()?)));
        firsts.min_by_key(|&(id, seniority)| self.rank(id, seniority))
    }

    /// Estimates the number of waiting sequences that would start before a new sequence.
    ///
    /// Counts the more senior sequences of the same tenant, and as many sequences of each other tenant,
    /// because tenants take turns. The exact number depends on the lengths of answers.
    pub fn ahead(&self, tenant: TenantId, seniority: Seniority) -> usize {
        let own = self.tenants.get(&tenant).map_or(0, |tenant| tenant.waiting.range(..seniority).count());
        let served = self.served_if_waiting(tenant);
        let others = self.tenants.iter().filter(|&(&id, _)| id != tenant);
        let of_other = |(&id, other): (&TenantId, &Tenant)| {
            let Some(&first) = other.waiting.first() else { return 0 };
            let is_first = self.rank(id, first) < (Reverse(seniority.is_protected()), served, seniority);
            other.waiting.len().min(own + usize::from(is_first))
        };
        own + others.map(of_other).sum::<usize>()
    }

    /// Returns the number of served tokens that the tenant would have after one more of its sequences starts to wait.
    fn served_if_waiting(&self, tenant: TenantId) -> u64 {
        let waiting = self.tenants.values().filter(|tenant| !tenant.waiting.is_empty());
        // While no sequence is waiting, serving one tenant does not delay any other tenant.
        let Some(floor) = waiting.map(|tenant| tenant.served).min() else { return 0 };
        match self.tenants.get(&tenant) {
            Some(tenant) if !tenant.waiting.is_empty() => tenant.served,
            Some(tenant) => tenant.served.max(floor),
            None => floor,
        }
    }

    /// Returns the rank of a sequence.
    pub fn rank(&self, tenant: TenantId, seniority: Seniority) -> Rank {
        let served = self.tenants.get(&tenant).map_or(0, |tenant| tenant.served);
        (Reverse(seniority.is_protected()), served, seniority)
    }

    /// Returns whether all sequences belong to the same tenant. If so, the order of ranks is the order of seniority.
    pub fn has_one_tenant(&self) -> bool {
        self.tenants.values().filter(|tenant| tenant.sequences > 0).nth(1).is_none()
    }

    /// Adds the tokens at the positions in `range` to the tenant's served tokens. The prompt ends at `prompt`.
    pub fn serve(&mut self, tenant: TenantId, range: Range<usize>, prompt: usize) {
        let generated = range.end.saturating_sub(range.start.max(prompt)) as u64;
        let tokens = range.len() as u64 + (GENERATED_WEIGHT - 1) * generated;
        if let Some(tenant) = self.tenants.get_mut(&tenant) {
            tenant.served = tenant.served.saturating_add(tokens);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn sequence(id: u64) -> Seniority {
        Seniority::new(0, Duration::from_secs(id), id)
    }

    fn first(queue: &FairQueue) -> Option<u64> {
        queue.first().map(|(_, seniority)| seniority.id())
    }

    /// Adds waiting sequences, given as pairs of a tenant and an id.
    fn wait(queue: &mut FairQueue, sequences: &[(TenantId, u64)]) {
        for &(tenant, id) in sequences {
            queue.join(tenant, 1);
            queue.insert(tenant, sequence(id));
        }
    }

    #[test]
    fn one_tenant_is_served_by_seniority() {
        let mut queue = FairQueue::default();
        wait(&mut queue, &[(7, 2), (7, 1), (7, 3)]);
        assert!(queue.has_one_tenant());
        for id in 1..=3 {
            assert_eq!(first(&queue), Some(id));
            queue.remove(7, &sequence(id));
            queue.serve(7, 0..100, 100);
        }
        assert_eq!(first(&queue), None);
    }

    #[test]
    fn the_tenant_with_the_fewest_tokens_is_next() {
        let mut queue = FairQueue::default();
        wait(&mut queue, &[(0, 0), (0, 1), (0, 2), (1, 3), (1, 4)]);
        assert!(!queue.has_one_tenant());
        let mut order = Vec::new();
        while let Some((tenant, seniority)) = queue.first() {
            order.push(seniority.id());
            queue.remove(tenant, &seniority);
            // Tenant 0 has prompts of 10 tokens. Tenant 1 has prompts of 4 tokens and generates one token.
            queue.serve(tenant, if tenant == 0 { 0..10 } else { 0..5 }, if tenant == 0 { 10 } else { 4 });
        }
        // After sequences 0 and 3, the weighted token counts of the tenants are 10 and 6. After sequence 4: 10 and 12.
        assert_eq!(order, [0, 3, 4, 1, 2]);
        queue.insert(1, sequence(5).protected());
        queue.insert(0, sequence(6));
        assert_eq!(first(&queue), Some(5), "a protected sequence is always next");
    }

    #[test]
    fn time_without_requests_gives_no_credit() {
        let mut queue = FairQueue::default();
        wait(&mut queue, &[(0, 0), (0, 1), (0, 2)]);
        queue.serve(0, 0..1000, 1000);
        wait(&mut queue, &[(1, 3), (1, 4)]);
        assert_eq!(first(&queue), Some(0), "a new tenant starts with as many served tokens as the other tenant");
        queue.serve(0, 0..1, 1);
        assert_eq!(first(&queue), Some(3));
        // While other tenants wait, a tenant keeps its count of served tokens, even if it has no requests.
        queue.serve(1, 0..500, 500);
        queue.remove(1, &sequence(3));
        queue.remove(1, &sequence(4));
        queue.leave(1);
        queue.leave(1);
        wait(&mut queue, &[(1, 5)]);
        assert_eq!(first(&queue), Some(0));
        queue.serve(0, 0..498, 498);
        assert_eq!(first(&queue), Some(0));
        queue.serve(0, 0..2, 2);
        assert_eq!(first(&queue), Some(5));
    }

    #[test]
    fn tenants_are_forgotten() {
        let mut queue = FairQueue::default();
        for tenant in 0..1000 {
            wait(&mut queue, &[(tenant, tenant)]);
            queue.serve(tenant, 0..10, 10);
            queue.remove(tenant, &sequence(tenant));
            queue.leave(tenant);
        }
        assert_eq!(queue.tenants.len(), 1);
    }
}
