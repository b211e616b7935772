//! [`TenantLedger`]: counts the sequences of each tenant, and the tokens served to it.

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
    /// The weighted number of tokens served since the last reset.
    /// `FairQueue::insert` resets the numbers of all tenants if no sequence is waiting.
    /// Otherwise, it can raise this number, so that the tenant gets no credit for time without waiting sequences.
    served: u64,
    /// The number of sequences that have not ended, including forks.
    sequences: usize,
}

impl TenantLedger {
    /// Adds new sequences to a tenant's count of sequences.
    pub fn join(&mut self, tenant: TenantId, sequences: usize) {
        self.accounts.entry(tenant).or_default().sequences += sequences;
    }

    /// Subtracts an ended sequence from a tenant's count of sequences.
    pub fn leave(&mut self, tenant: TenantId) {
        if let Some(account) = self.accounts.get_mut(&tenant) {
            account.sequences -= 1;
        }
    }

    /// Counts a sequence's tokens at the positions in `range` as served, each with its weight.
    /// The sequence has `prompt` prompt tokens.
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

    /// Returns the turn of a tenant's sequence with this seniority,
    /// from the weighted number of tokens served to the tenant.
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
