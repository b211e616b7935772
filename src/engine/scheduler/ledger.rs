//! [`TenantLedger`]: counts the tokens that were served to each tenant.

use std::collections::BTreeMap;
use std::ops::Range;

use super::order::{SchedulingTurn, Seniority};

/// Identifies the owner of a sequence, such as a client with its own API key.
pub type TenantId = u64;

/// The weight of a generated token. A prompt token has weight 1. Source: the paper that `fair_queue.rs` cites.
const GENERATED_WEIGHT: u64 = 2;

/// For each tenant, the number of its sequences, and the weighted number of tokens served to it.
#[derive(Default)]
pub struct TenantLedger {
    accounts: BTreeMap<TenantId, Account>,
}

#[derive(Default)]
struct Account {
    /// The weighted number of served tokens.
    /// `FairQueue::insert` raises or resets this number when a sequence starts to wait.
    /// A tenant therefore gets no credit for time without waiting sequences.
    served: u64,
    /// The number of sequences that have not ended, waiting or not.
    sequences: usize,
}

impl TenantLedger {
    /// Counts new sequences of a tenant.
    pub fn join(&mut self, tenant: TenantId, sequences: usize) {
        self.accounts.entry(tenant).or_default().sequences += sequences;
    }

    /// Counts a sequence of a tenant as ended.
    pub fn leave(&mut self, tenant: TenantId) {
        if let Some(account) = self.accounts.get_mut(&tenant) {
            account.sequences -= 1;
        }
    }

    /// Counts the tokens at the positions in `range` as served. `prompt` is the number of prompt tokens.
    pub fn serve(&mut self, tenant: TenantId, range: Range<usize>, prompt: usize) {
        let generated = range.end.saturating_sub(range.start.max(prompt)) as u64;
        let tokens = range.len() as u64 + (GENERATED_WEIGHT - 1) * generated;
        if let Some(account) = self.accounts.get_mut(&tenant) {
            account.served = account.served.saturating_add(tokens);
        }
    }

    /// Returns the weighted number of tokens served to a tenant.
    pub fn served(&self, tenant: TenantId) -> u64 {
        self.accounts.get(&tenant).map_or(0, |account| account.served)
    }

    pub fn set_served(&mut self, tenant: TenantId, served: u64) {
        self.accounts.entry(tenant).or_default().served = served;
    }

    /// Sets the served tokens of all tenants to 0.
    pub fn reset(&mut self) {
        self.accounts.values_mut().for_each(|account| account.served = 0);
    }

    /// Removes the tenants that have no sequences and were served at most `served` weighted tokens.
    pub fn forget(&mut self, served: u64) {
        self.accounts.retain(|_, account| account.sequences > 0 || account.served > served);
    }

    /// Returns the turn of a sequence of this tenant, given the tokens served to the tenant so far.
    pub fn turn(&self, tenant: TenantId, seniority: Seniority) -> SchedulingTurn {
        SchedulingTurn::new(self.served(tenant), seniority)
    }

    /// Returns whether at most one tenant has sequences. Turns then follow seniority.
    pub fn has_one_tenant(&self) -> bool {
        self.accounts.values().filter(|account| account.sequences > 0).nth(1).is_none()
    }

    /// Returns the number of tenants in the ledger.
    #[cfg(test)]
    pub fn tenants(&self) -> usize {
        self.accounts.len()
    }
}
